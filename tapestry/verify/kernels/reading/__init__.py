"""Sources read: from the text of a kernel to terms."""
