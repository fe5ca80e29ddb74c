"""Logging of a run: terminal, files, TensorBoard, tracking services, and the record of drawn samples."""
