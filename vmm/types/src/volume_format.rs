//! Formats of volumes.

use std::fmt;

use serde::Serialize;

/// Format of a volume's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeFormat {
    /// A Block Translation Table. The volume is a disk whose sectors cannot be torn by a power
    /// loss.
    Btt,
    /// Raw bytes. Programs in the guest may map them (DAX), and a power loss may tear sectors.
    Raw,
}

impl VolumeFormat {
    /// All formats.
    pub const ALL: [Self; 2] = [Self::Btt, Self::Raw];

    /// Returns true if a new volume of this format is thin unless its creator requests a thick one.
    pub fn is_thin_by_default(self) -> bool {
        self == Self::Btt
    }

    /// Name in flags, in JSON and in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Btt => "btt",
            Self::Raw => "raw",
        }
    }
}

impl fmt::Display for VolumeFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
