"""What several operators share: backends, layouts, scratch memory, launch configurations, parts of kernels."""
