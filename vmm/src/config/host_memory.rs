//! What `--memory` and `--memory-zone` say alike: of what on the host their memory is.

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::Options;
use super::size::{Size, UNIT_BYTES};

/// A file system on which one page would be larger than this is not known.
const MAX_PAGE_BYTES: u64 = 1 << 40;

/// `shared=,mergeable=,hugepages=,hugepage_size=,prefault=,reserve=`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemoryConfig {
    /// Other processes can map it.
    #[serde(default)]
    pub shared: bool,
    /// The host may keep pages of the same content once.
    #[serde(default)]
    pub mergeable: bool,
    /// It is of huge pages that the host has set aside.
    #[serde(default)]
    pub hugepages: bool,
    /// How large they are; the host's usual ones if that is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// The host finds all its pages before the guest runs.
    #[serde(default)]
    pub prefault: bool,
    /// The host counts all of it as taken at once.
    #[serde(default)]
    pub reserve: bool,
}

impl HostMemoryConfig {
    /// Reads its keys among a flag's.
    pub(super) fn read(options: &Options) -> Result<Self, ConfigError> {
        let switch = |key| options.switch(key).map(Option::unwrap_or_default);
        Ok(Self {
            shared: switch("shared")?,
            mergeable: switch("mergeable")?,
            hugepages: switch("hugepages")?,
            hugepage_size: options.size("hugepage_size")?,
            prefault: switch("prefault")?,
            reserve: switch("reserve")?,
        })
    }

    /// The first of its switches that is on.
    pub(super) fn first_on(&self) -> Option<&'static str> {
        let switches = [
            ("shared", self.shared),
            ("mergeable", self.mergeable),
            ("hugepages", self.hugepages),
            ("prefault", self.prefault),
            ("reserve", self.reserve),
        ];
        switches.into_iter().find_map(|(key, is_on)| is_on.then_some(key))
    }

    /// Pages that there can be, and `sizes`, by their keys, in whole ones.
    pub(super) fn validate(
        &self,
        flag: &'static str,
        sizes: [(&'static str, u64); 2],
    ) -> Result<(), ConfigError> {
        let conflict = |reason: &str| Err(ConfigError::Conflict { flag, reason: reason.to_owned() });
        if self.mergeable && (self.shared || self.hugepages) {
            return conflict(
                "mergeable=on goes with neither shared=on nor hugepages=on: Linux merges pages of private memory alone, and small ones",
            );
        }
        let Some(page_bytes) = self.hugepage_size else { return Ok(()) };
        if !self.hugepages {
            return conflict("hugepage_size needs hugepages=on");
        }
        if !page_bytes.is_power_of_two() || !(UNIT_BYTES / 2..=MAX_PAGE_BYTES).contains(&page_bytes) {
            let value = Size(page_bytes).to_string();
            let expected = "a size that huge pages have: 2M or 1G".to_owned();
            return Err(ConfigError::BadValue { flag, key: "hugepage_size".to_owned(), value, expected });
        }
        match sizes.iter().find(|(_, bytes)| !bytes.is_multiple_of(page_bytes)) {
            Some(&(key, bytes)) => {
                let (value, unit) = (Size(bytes), Size(page_bytes));
                Err(ConfigError::NotMultiple { flag, key, value, unit })
            }
            None => Ok(()),
        }
    }
}
