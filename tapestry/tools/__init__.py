"""Programs that use the compiler. None of the compiler's modules imports one, and none imports another: see `plugins.tool`."""
