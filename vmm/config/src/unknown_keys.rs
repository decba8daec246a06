//! Unknown fields in JSON.
//!
//! Unknown fields are ignored, as in Cloud Hypervisor, so that clients of a later version continue
//! to work (docs/design/decisions/0019). A mistyped field is ignored as well, so a warning names
//! the unknown fields.

/// Maximum number of names in a warning, because a client may send thousands of fields.
const MOST_NAMES: usize = 8;
/// Maximum length of a name in a warning, in characters.
const MOST_CHARS: usize = 64;

/// Names of unknown fields in a JSON body.
#[derive(Debug, Default)]
pub struct Unknown {
    names: Vec<String>,
    count: usize,
}

impl Unknown {
    /// Adds the field `key` of the object at `path`. `path` is empty for the body itself.
    pub fn add(&mut self, path: &str, key: &str) {
        self.count += 1;
        if self.names.len() < MOST_NAMES {
            let dot = if path.is_empty() { "" } else { "." };
            // Clients may send any characters, but a warning must be one line.
            let key: String = key.chars().take(MOST_CHARS).collect();
            self.names.push(format!("{path}{dot}{}", key.escape_debug()));
        }
    }

    /// Returns a warning in one line if there are unknown fields.
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
