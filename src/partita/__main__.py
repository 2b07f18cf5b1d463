"""`python -m partita` is the command `partita`."""

from partita.cli.main import command

if __name__ == "__main__":
    command()
