"""Forward, loss and backward of a micro-batch as CUDA graphs, recorded where they pay."""
