"""Object stores behind one protocol: S3, Google Cloud, Azure, HTTP, the Hub, others' packages."""
