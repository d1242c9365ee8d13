"""The command line: Typer and nothing else; each verb calls its function in `commands`."""
