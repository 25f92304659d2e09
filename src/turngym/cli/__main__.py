"""`python -m turngym.cli` is `turngym`."""

from turngym.cli import main

if __name__ == "__main__":
    main()
