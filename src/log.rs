//! Where messages go: a callback per context. There is no default sink, no global logger, no stdout.

use std::sync::Arc;

/// How much a message matters. A context passes on its level and everything below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something failed that the caller will not hear of otherwise.
    Error = 1,
    /// Something works, but not as well as it could.
    Warning = 2,
    /// What was chosen: device, kernel; and what a call did that takes seconds.
    Info = 3,
}

/// Receives messages, on the thread that called Folio.
pub type Sink = Arc<dyn Fn(Level, &str) + Send + Sync>;

/// A sink and the most talkative level that reaches it. Clones share the sink: a context has one, and its
/// backend another.
#[derive(Clone)]
pub struct Logger {
    sink: Option<Sink>,
    level: Level,
}

impl Logger {
    /// Passes messages up to `level` to `sink`.
    pub fn new(sink: Sink, level: Level) -> Logger {
        Logger {
            sink: Some(sink),
            level,
        }
    }

    /// Drops every message.
    pub fn silent() -> Logger {
        Logger {
            sink: None,
            level: Level::Error,
        }
    }

    /// Formats and passes on a message, if anybody listens.
    pub fn log(&self, level: Level, message: std::fmt::Arguments<'_>) {
        if let Some(sink) = self.sink.as_ref().filter(|_| level <= self.level) {
            sink(level, &message.to_string());
        }
    }
}

impl std::fmt::Debug for Logger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Logger({:?})", self.level)
    }
}
