"""`python -m turngym.cli` is `turngym`."""

from turngym.cli import main

main()
