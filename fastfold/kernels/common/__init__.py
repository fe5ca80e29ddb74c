"""Parts shared by several operators: backends, layouts, scratch memory, launch configurations, parts of kernels."""
