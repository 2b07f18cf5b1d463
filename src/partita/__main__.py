"""`python -m partita` is the command `partita`."""

from partita.cli.main import main

if __name__ == "__main__":
    main()
