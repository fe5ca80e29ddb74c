"""The subcommands of ``fastfold``, a module each."""
