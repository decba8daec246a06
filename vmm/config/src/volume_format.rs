//! Volume formats as option words.

use foreshore_types::VolumeFormat;

use super::{Word, Words};

impl Words for VolumeFormat {
    const WORDS: &'static [Word<Self>] = &[word(Self::Btt), word(Self::Raw)];
}

const fn word(value: VolumeFormat) -> Word<VolumeFormat> {
    let name = value.as_str();
    Word { value, json: name, json_aliases: &[], flag: name, flag_aliases: &[], is_shown: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_has_the_word_that_json_is_written_with() {
        for format in VolumeFormat::ALL {
            assert_eq!(serde_json::to_value(format).unwrap(), format.word().json);
        }
    }
}
