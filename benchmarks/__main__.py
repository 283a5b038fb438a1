"""``python -m benchmarks``, in a checkout."""

from benchmarks.command import main

if __name__ == "__main__":
    raise SystemExit(main())
