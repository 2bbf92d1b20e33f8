from mlx_spec.cli import cli

cli(prog_name="mlx-spec")
