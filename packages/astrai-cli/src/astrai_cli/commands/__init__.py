"""One module per command; :data:`astrai_cli.main.COMMANDS` names them, and only the one that runs is imported."""
