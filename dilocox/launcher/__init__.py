"""Parts of `dilocox launch`: processes, their output, and what is shown of a run."""
