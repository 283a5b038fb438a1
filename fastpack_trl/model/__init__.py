"""Read and change models of other libraries."""
