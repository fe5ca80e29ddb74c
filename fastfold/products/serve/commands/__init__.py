"""Commands of the HTTP service: the server, and its client."""
