"""Tasks of design: protocols, layouts of designed chains, given chains, and losses."""
