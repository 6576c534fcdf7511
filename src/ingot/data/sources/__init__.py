"""Input files, and the documents in them: text, JSON, CSV, Parquet, plain or compressed, local or remote."""
