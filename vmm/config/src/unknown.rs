//! Unknown fields in JSON.
//!
//! Unknown fields are ignored, as in Cloud Hypervisor, so that clients of a later version continue
//! to work (docs/design/decisions/0019). Because a mistyped field is ignored as well, the warning
//! names the fields.

/// Upper limit of names in a warning, because a client may send thousands of fields.
const MOST_NAMES: usize = 8;
/// Upper limit of characters of a name in a warning.
const MOST_CHARS: usize = 64;

/// Names of unknown fields.
#[derive(Debug, Default)]
pub struct Unknown {
    names: Vec<String>,
    count: usize,
}

impl Unknown {
    /// Adds a field of the object at `path`, which is empty for the whole body.
    pub fn add(&mut self, path: &str, key: &str) {
        self.count += 1;
        if self.names.len() < MOST_NAMES {
            let dot = if path.is_empty() { "" } else { "." };
            // Clients may send any characters, but a warning must be one line.
            let key: String = key.chars().take(MOST_CHARS).collect();
            self.names.push(format!("{path}{dot}{}", key.escape_debug()));
        }
    }

    /// Warning in one line, if there are any.
    pub fn warning(&self) -> Option<String> {
        let more = match self.count - self.names.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let fields = if self.count == 1 { "field" } else { "fields" };
        let names = self.names.join(", ");
        (self.count > 0).then(|| format!("Ignored unknown {fields}: {names}{more}"))
    }
}
