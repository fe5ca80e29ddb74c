"""One package per operator: definition and public function in ``op``, PyTorch in ``eager``, Triton in ``triton_*``."""
