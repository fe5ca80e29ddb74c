"""Files from servers: requests, reading from any position, and members of archives."""
