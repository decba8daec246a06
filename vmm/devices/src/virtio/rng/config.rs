//! `--rng`.

use std::path::PathBuf;

use foreshore_config::refused_keys as refused;
use foreshore_config::{Refused, section};

const REFUSED: &[Refused] = &[Refused {
    key: "id",
    neutral: &["__rng"],
    why: "the VM has one entropy device, which cannot be removed",
}];

section! {
    /// Entropy source.
    pub struct RngConfig: "--rng" "Entropy" {
        src (json_required): PathBuf = "/dev/urandom".into() => "File to read entropy from",
    }
    refused &[refused::PCI, refused::SLOT, REFUSED];
    defaults true;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_is_parsed() {
        assert_eq!(RngConfig::parse("src=/dev/hwrng").unwrap().src, PathBuf::from("/dev/hwrng"));
        assert_eq!(RngConfig::parse("iommu=off"), Ok(RngConfig::default()));
        let error = RngConfig::parse("source=/dev/random").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"--rng: unknown key "source" (did you mean 'src='?); the keys are src="#
        );
    }
}
