"""`python -m negchain` is the command line."""

from negchain.cli import main

if __name__ == "__main__":
    main()
