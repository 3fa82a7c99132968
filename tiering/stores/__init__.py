"""Where the bytes of blocks lie: the port, the DRAM slab and the NVMe slab file."""
