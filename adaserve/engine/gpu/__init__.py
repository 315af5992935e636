"""The parts of an iteration on a GPU: padded forwards in CUDA graphs, noise, asynchronous copies."""
