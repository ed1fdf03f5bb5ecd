"""What ends the billing when nobody else does: the fuse on the machine, the sentinel beside it, and their proofs."""
