"""Parallel training and inference of any ``nn.Module``: meshes, collectives, layers."""
