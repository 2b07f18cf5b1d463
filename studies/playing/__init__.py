"""Studies in one TOML file each: read them, play their runs, and make tables and pictures of the lines."""
