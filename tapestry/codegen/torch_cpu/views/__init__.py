"""Operations seen on views of the buffers that they have: images as rows, pixels side by side."""
