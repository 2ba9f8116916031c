"""The matrix instruction of each chip for operands of 16 bits, as the opcode begins."""

MATRIX = {"sm80": "HMMA", "sm86": "HMMA", "sm89": "HMMA", "sm90": "HGMMA", "sm100": "UTCHMMA", "gfx942": "v_mfma"}
