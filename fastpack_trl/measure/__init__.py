"""What is counted and timed, and how it is written down."""
