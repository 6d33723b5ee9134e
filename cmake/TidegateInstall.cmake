# cmake --install: library, headers, package config.
