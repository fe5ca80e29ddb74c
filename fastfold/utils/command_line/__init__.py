"""Options of commands: from fields of dataclasses, from a file, and in two lengths of help."""
