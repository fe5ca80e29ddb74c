"""Options and printed lines that all commands that fold share."""
