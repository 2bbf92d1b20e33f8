"""`mlx-spec bench`: decoding speed with and without drafts, in one process, on the same prompts;
`mlx-spec verify`: whether drafts leave the text as it is."""
