//! Keys of both `--memory` and `--memory-zone`, for the host memory that backs guest memory.

use foreshore_config::{ConfigError, section};
use foreshore_types::UNIT_BYTES;
use foreshore_types::size::Size;

/// No file system is known to have larger pages.
const MAX_PAGE_BYTES: u64 = 1 << 40;

section! {
    /// Host memory that backs guest memory.
    pub struct HostMemoryConfig: "--memory" "Host memory" {
        shared: bool = false => "Let other processes map the memory",
        mergeable: bool = false => "Let the host merge pages of the same content",
        hugepages: bool = false => "Use huge pages that the host has reserved",
        hugepage_size: Option<u64> => "Size of a huge page, instead of the host's default",
        prefault: bool = false => "Allocate all pages before the guest runs",
        reserve: bool = false => "Reserve all memory on the host at once",
    }
    defaults true;
    parse none;
}

impl HostMemoryConfig {
    /// Returns the first switch in the section that is on.
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

    /// Checks the page size, and that all `sizes`, pairs of a key and its value, are multiples of
    /// it.
    pub(super) fn validate(
        &self,
        flag: &'static str,
        sizes: [(&'static str, u64); 2],
    ) -> Result<(), ConfigError> {
        let conflict =
            |reason: &str| Err(ConfigError::Conflict { flag, reason: reason.to_owned() });
        if self.mergeable && (self.shared || self.hugepages) {
            return conflict(
                "mergeable=on excludes shared=on and hugepages=on, because Linux merges only small pages of private memory",
            );
        }
        let Some(page_bytes) = self.hugepage_size else { return Ok(()) };
        if !self.hugepages {
            return conflict("hugepage_size needs hugepages=on");
        }
        if !page_bytes.is_power_of_two() || !(UNIT_BYTES / 2..=MAX_PAGE_BYTES).contains(&page_bytes)
        {
            let value = Size(page_bytes).to_string();
            let expected = "a size that huge pages have: 2M or 1G".to_owned();
            return Err(ConfigError::BadValue {
                flag,
                key: "hugepage_size".to_owned(),
                value,
                expected,
            });
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
