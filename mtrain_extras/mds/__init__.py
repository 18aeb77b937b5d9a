"""`data=mds`, by an entry point: folders of MDS shards."""
