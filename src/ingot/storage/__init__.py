"""Files on disk and in object stores: atomic writes, hashes, byte sizes, URLs."""
