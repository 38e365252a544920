//! Declared provider options.
