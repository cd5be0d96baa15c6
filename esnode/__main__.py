"""`python -m esnode`: the command, where its script is not on the path."""

from esnode.cli.entry import main

if __name__ == "__main__":
    main()
