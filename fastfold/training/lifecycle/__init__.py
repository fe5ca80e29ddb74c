"""How a run starts, is stopped, and goes on."""
