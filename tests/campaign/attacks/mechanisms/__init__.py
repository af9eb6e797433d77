"""What the families of attacks do to the operating system; nothing here knows of jobs or plans."""
