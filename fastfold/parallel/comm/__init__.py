"""Groups of ranks and their messages: differentiable, asynchronous, counted."""
