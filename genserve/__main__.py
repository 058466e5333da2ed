"""`python -m genserve` is the `genserve` command."""

from genserve.cli import main

if __name__ == "__main__":
    main()
