"""What `mlx-spec serve` adds around mlx_lm.server."""
