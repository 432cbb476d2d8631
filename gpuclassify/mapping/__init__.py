"""Models mapped over the partitions of a frame; read `partition_map.py` first."""
