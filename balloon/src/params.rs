//! Named parameters, with one table for each policy and one for the rules. The command line, the
//! API and docs/reference/policies.md read names, units, bounds and defaults from these tables.

use std::fmt;

use foreshore_types::similar::suggestion_from_list;
use foreshore_types::size::{self, Size, SizeError};
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

use crate::BLOCK_BYTES;

/// Unit of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Bytes, for example `4096` or `512M`.
    Bytes,
    /// Bytes that must be a multiple of the block size of 2 MiB.
    Blocks,
    /// Milliseconds, for example `500ms` or `2s`.
    Ms,
    /// Thousandths of a whole.
    Permille,
    /// A plain number.
    Count,
}

/// Units of time. `ms` precedes `m` and `s` because suffixes are tried in this order, and it
/// contains both letters.
const TIMES: [(&str, u64); 4] = [("ms", 1), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)];

impl Unit {
    /// Returns the unit's name in documentation.
    pub fn label(self) -> &'static str {
        match self {
            Unit::Bytes => "bytes",
            Unit::Blocks => "bytes, whole blocks of 2M",
            Unit::Ms => "time",
            Unit::Permille => "permille",
            Unit::Count => "count",
        }
    }

    /// Describes the valid values of the unit.
    fn expected(self) -> String {
        match self {
            Unit::Bytes => format!("a size: {}", size::SYNTAX),
            Unit::Blocks => {
                format!("a multiple of {}: {}", Size(BLOCK_BYTES).compact(), size::SYNTAX)
            }
            Unit::Ms => "a time: a number with ms, s, m or h".to_owned(),
            Unit::Permille => "a whole number of thousandths".to_owned(),
            Unit::Count => "a whole number".to_owned(),
        }
    }

    /// Parses a value with this unit.
    pub fn parse(self, text: &str) -> Result<u64, ValueError> {
        let value = match self {
            Unit::Bytes | Unit::Blocks => Some(size::parse(text)?),
            // A time needs a unit, because users might read a plain number as seconds.
            Unit::Ms => with_suffix(text, &TIMES),
            Unit::Permille | Unit::Count => digits(text),
        };
        value.filter(|value| self.fits(*value)).ok_or(ValueError::Unfit(self))
    }

    /// Formats a value with the largest suffix that divides it evenly.
    pub fn show(self, value: u64) -> String {
        match self {
            Unit::Bytes | Unit::Blocks => Size(value).compact(),
            Unit::Ms => {
                let mut units = TIMES[1..].iter();
                match units.find(|(_, unit)| value != 0 && value.is_multiple_of(*unit)) {
                    Some((suffix, unit)) => format!("{}{suffix}", value / unit),
                    None => format!("{value}ms"),
                }
            }
            Unit::Permille | Unit::Count => value.to_string(),
        }
    }

    fn fits(self, value: u64) -> bool {
        self != Unit::Blocks || value.is_multiple_of(BLOCK_BYTES)
    }
}

fn digits(text: &str) -> Option<u64> {
    // `u64::from_str` accepts a leading `+`, but parameters have no sign.
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn with_suffix(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    units.iter().find_map(|(suffix, unit)| {
        let at = text.len().checked_sub(suffix.len())?;
        let (number, end) = (text.get(..at)?, text.get(at..)?);
        end.eq_ignore_ascii_case(suffix).then(|| digits(number)?.checked_mul(*unit)).flatten()
    })
}

/// Reason why a text is not a valid value for a unit.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ValueError {
    /// The text is not a size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The text is not a time or a number, or it is a size that is not a multiple of the block
    /// size.
    #[error("must be {}", .0.expected())]
    Unfit(Unit),
}

/// Description of one parameter of a policy or of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Param {
    /// Name on the command line, in the API and in errors.
    pub name: &'static str,
    /// Unit of the value.
    pub unit: Unit,
    /// Lower bound.
    pub low: u64,
    /// Upper bound.
    pub high: u64,
    /// Default value.
    pub default: u64,
    /// Description for users.
    pub about: &'static str,
}

/// Value as the user entered it: a number in the parameter's own unit (bytes, milliseconds or
/// thousandths), or a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Setting {
    /// Number in the parameter's own unit.
    Number(u64),
    /// Text with a unit, for example `512M`.
    Text(String),
}

impl Setting {
    /// End of the error "must be ..." for a JSON value of the wrong type.
    pub const EXPECTED: &'static str = r#"a whole number, or a text such as "512M" or "2s""#;
}

impl<'de> Deserialize<'de> for Setting {
    /// Works like `#[serde(untagged)]`, except that errors also show the value that was found.
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct NumberOrText;

        impl Visitor<'_> for NumberOrText {
            type Value = Setting;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(Setting::EXPECTED)
            }

            fn visit_u64<E>(self, number: u64) -> Result<Setting, E> {
                Ok(Setting::Number(number))
            }

            fn visit_str<E>(self, text: &str) -> Result<Setting, E> {
                Ok(Setting::from(text))
            }
        }

        from.deserialize_any(NumberOrText)
    }
}

impl From<&str> for Setting {
    fn from(text: &str) -> Self {
        Setting::Text(text.to_owned())
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Number(number) => number.fmt(f),
            Setting::Text(text) => write!(f, "{text:?}"),
        }
    }
}

/// Reason why a parameter is refused. The other settings remain unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParamError {
    /// The value is out of bounds.
    #[error("{name} is {}, must be {} to {}", .unit.show(*.value), .unit.show(*.low), .unit.show(*.high))]
    OutOfRange {
        /// Name of the parameter.
        name: &'static str,
        /// Value of the parameter.
        value: u64,
        /// Unit of the parameter.
        unit: Unit,
        /// Lower bound.
        low: u64,
        /// Upper bound.
        high: u64,
    },
    /// The value is below the value of another parameter.
    #[error("{name} is {}, must be at least {other}, which is {}", .unit.show(*.value), .unit.show(*.bound))]
    BelowOther {
        /// Name of the parameter.
        name: &'static str,
        /// Value of the parameter.
        value: u64,
        /// Unit of both parameters.
        unit: Unit,
        /// Name of the other parameter.
        other: &'static str,
        /// Value of the other parameter.
        bound: u64,
    },
    /// The text is not a size.
    #[error("{name}={error}")]
    NotASize {
        /// Name of the parameter.
        name: &'static str,
        /// Reason why the text is not a size.
        error: SizeError,
    },
    /// The value does not fit the parameter's unit.
    #[error("{name} is {setting}, must be {}", .unit.expected())]
    NotAValue {
        /// Name of the parameter.
        name: &'static str,
        /// Value as the user entered it.
        setting: Setting,
        /// Unit of the parameter.
        unit: Unit,
    },
    /// No parameter has this name.
    #[error(
        "parameter {name:?} is unknown{}; parameters of {of}: {known}",
        suggestion_from_list(name, known)
    )]
    Unknown {
        /// Name that the user entered.
        name: String,
        /// Name of the policy whose parameters were searched, or of the rules.
        of: &'static str,
        /// Names of all parameters in that policy or in the rules.
        known: String,
    },
}

/// Struct of parameters that are described by a table.
pub trait Parameters {
    /// Returns the descriptions of all parameters, in a fixed order.
    fn table(&self) -> &'static [Param];

    /// Returns pairs of parameters. The second parameter of a pair must not be less than the first.
    fn order(&self) -> &'static [(&'static str, &'static str)];

    /// Returns the parameter's value at this index of the table.
    fn value(&self, index: usize) -> u64;

    /// Returns a mutable reference to a value. A value written through it is not checked until
    /// [`Parameters::validate`] is called.
    fn slot(&mut self, index: usize) -> &mut u64;

    /// Returns the value of the parameter called `name`.
    fn get(&self, name: &str) -> Option<u64> {
        let index = self.table().iter().position(|param| param.name == name)?;
        Some(self.value(index))
    }

    /// Sets a parameter. `of` names this set of parameters in errors. Pairs are not checked until
    /// [`Parameters::validate`] is called, so that both parameters of a pair can be changed first.
    fn set(&mut self, of: &'static str, name: &str, setting: &Setting) -> Result<(), ParamError> {
        let table = self.table();
        let Some(index) = table.iter().position(|param| param.name == name) else {
            return Err(ParamError::Unknown { name: name.to_owned(), of, known: names(table) });
        };
        let param = &table[index];
        let value = match setting {
            Setting::Number(number) => *number,
            Setting::Text(text) => param.unit.parse(text).map_err(|error| match error {
                ValueError::Size(error) => ParamError::NotASize { name: param.name, error },
                ValueError::Unfit(unit) => {
                    ParamError::NotAValue { name: param.name, setting: setting.clone(), unit }
                }
            })?,
        };
        param.check(value)?;
        *self.slot(index) = value;
        Ok(())
    }

    /// Checks that all parameters are within their bounds and that all pairs are in order.
    fn validate(&self) -> Result<(), ParamError> {
        let table = self.table();
        table.iter().zip(0..).try_for_each(|(param, index)| param.check(self.value(index)))?;
        for (lesser, greater) in self.order() {
            let (Some(bound), Some(value)) = (self.get(lesser), self.get(greater)) else {
                continue;
            };
            if value < bound {
                let unit = table
                    .iter()
                    .find(|param| param.name == *greater)
                    .map_or(Unit::Count, |p| p.unit);
                return Err(ParamError::BelowOther {
                    name: greater,
                    value,
                    unit,
                    other: lesser,
                    bound,
                });
            }
        }
        Ok(())
    }
}

impl Param {
    fn check(&self, value: u64) -> Result<(), ParamError> {
        let Param { name, unit, low, high, .. } = *self;
        if !unit.fits(value) {
            return Err(ParamError::NotAValue { name, setting: Setting::Number(value), unit });
        }
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(ParamError::OutOfRange { name, value, unit, low, high })
    }
}

/// Joins the names in a table into a list for an error.
fn names(table: &[Param]) -> String {
    if table.is_empty() {
        return "none".to_owned();
    }
    table.iter().map(|param| param.name).collect::<Vec<_>>().join(", ")
}

/// Defines a struct of parameters and its table: `/// description`, `field: "name", Unit, low =>
/// high, default;`.
macro_rules! params {
    (
        $(#[$meta:meta])*
        $vis:vis struct $struct:ident {
            $($(#[doc = $doc:literal])+ $field:ident: $name:literal, $unit:ident, $low:expr => $high:expr, $default:expr;)*
        }
        $(and { $($(#[$other_meta:meta])+ $other:ident: $other_type:ty = $other_default:expr;)* })?
        $(order { $($lesser:literal <= $greater:literal;)* })?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
        $vis struct $struct {
            $($(#[doc = $doc])+ pub $field: u64,)*
            $($($(#[$other_meta])+ pub $other: $other_type,)*)?
        }

        impl Default for $struct {
            fn default() -> Self {
                Self { $($field: $default,)* $($($other: $other_default,)*)? }
            }
        }

        impl $struct {
            /// Descriptions of all parameters.
            $vis const TABLE: &'static [$crate::params::Param] = &[$($crate::params::Param {
                name: $name,
                unit: $crate::params::Unit::$unit,
                low: $low,
                high: $high,
                default: $default,
                about: concat!($($doc,)+),
            },)*];

            /// Checks that all parameters are within their bounds.
            $vis fn validate(&self) -> Result<(), $crate::ParamError> {
                $crate::params::Parameters::validate(self)
            }
        }

        impl $crate::params::Parameters for $struct {
            fn table(&self) -> &'static [$crate::params::Param] {
                Self::TABLE
            }

            fn order(&self) -> &'static [(&'static str, &'static str)] {
                &[$($(($lesser, $greater),)*)?]
            }

            fn value(&self, index: usize) -> u64 {
                [$(self.$field,)*][index]
            }

            fn slot(&mut self, index: usize) -> &mut u64 {
                let slots: [&mut u64; Self::TABLE.len()] = [$(&mut self.$field,)*];
                slots.into_iter().nth(index).expect("an index into the table")
            }
        }
    };
}
pub(crate) use params;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MIB;

    params! {
        struct Tides {
            /// How high,
            /// at the most.
            high_bytes: "high", Bytes, 4096 => 1 << 40, 8 * MIB;
            /// How low.
            low_bytes: "low", Blocks, 0 => 1 << 40, 2 * MIB;
            /// How long.
            period_ms: "period", Ms, 100 => 86_400_000, 44_700_000;
            /// How often.
            count: "count", Count, 1 => 9, 2;
        }
        order { "low" <= "high"; }
    }

    fn set(tides: &mut Tides, name: &str, text: &str) -> Result<(), String> {
        tides.set("tides", name, &text.into()).map_err(|error| error.to_string())
    }

    #[test]
    fn parameters_are_set_and_read_by_name() {
        let mut tides = Tides::default();
        assert_eq!(tides.validate(), Ok(()));
        for (name, text) in [("high", "512M"), ("low", "4m"), ("period", "2s"), ("count", "3")] {
            set(&mut tides, name, text).expect(text);
        }
        let set = Tides { high_bytes: 512 * MIB, low_bytes: 4 * MIB, period_ms: 2_000, count: 3 };
        assert_eq!(tides, set);
        assert_eq!((tides.get("period"), tides.get("phase")), (Some(2_000), None));
        tides
            .set("tides", "period", &Setting::Number(500))
            .expect("a number has the parameter's unit");
        assert_eq!(tides.period_ms, 500);
        assert_eq!(Tides::TABLE[0].about, " How high, at the most.");
    }

    #[test]
    fn wrong_setting_is_named_with_its_bound_and_changes_nothing() {
        let mut tides = Tides::default();
        let wrong = [
            ("count", "10", "count is 10, must be 1 to 9"),
            ("count", "0", "count is 0, must be 1 to 9"),
            ("period", "99ms", "period is 99ms, must be 100ms to 24h"),
            ("period", "25h", "period is 25h, must be 100ms to 24h"),
            ("period", "5", r#"period is "5", must be a time: a number with ms, s, m or h"#),
            ("high", "2T", "high is 2T, must be 4K to 1T"),
            ("high", "2 M", r#"high="2 M" is not a size: bytes, or a number with K, M, G or T"#),
            (
                "high",
                "64MB",
                r#"high="64MB" could be 64000000 or 67108864 bytes; use 64M, 64MiB or the number of bytes"#,
            ),
            (
                "low",
                "3M",
                r#"low is "3M", must be a multiple of 2M: bytes, or a number with K, M, G or T"#,
            ),
            (
                "moon",
                "1",
                r#"parameter "moon" is unknown; parameters of tides: high, low, period, count"#,
            ),
        ];
        for (name, text, message) in wrong {
            assert_eq!(set(&mut tides, name, text), Err(message.to_owned()));
        }
        let odd = tides.set("tides", "low", &Setting::Number(MIB)).expect_err("half a block");
        assert!(odd.to_string().starts_with("low is 1048576, must be a multiple of 2M"), "{odd}");
        assert_eq!(tides, Tides::default());
    }

    #[test]
    fn pair_is_checked_after_both_are_set() {
        let mut tides = Tides::default();
        set(&mut tides, "low", "16M").expect("in its own bounds");
        let error = tides.validate().expect_err("above high");
        assert_eq!(error.to_string(), "high is 8M, must be at least low, which is 16M");
        set(&mut tides, "high", "16M").expect("in its own bounds");
        assert_eq!(tides.validate(), Ok(()));
    }

    #[test]
    fn formatted_value_can_be_parsed() {
        let values = [
            0,
            1,
            999,
            1_000,
            1_024,
            59_000,
            60_000,
            90_000,
            3_600_000,
            2 * MIB,
            3 << 40,
            u64::MAX,
        ];
        for unit in [Unit::Bytes, Unit::Blocks, Unit::Ms, Unit::Permille, Unit::Count] {
            for value in values.into_iter().filter(|value| unit.fits(*value)) {
                assert_eq!(
                    unit.parse(&unit.show(value)),
                    Ok(value),
                    "{unit:?} {}",
                    unit.show(value)
                );
            }
        }
        assert_eq!(
            (Unit::Ms.show(90_000), Unit::Bytes.show(3 * MIB)),
            ("90s".to_owned(), "3M".to_owned())
        );
    }

    #[test]
    fn invalid_values_are_refused() {
        for text in [
            "",
            "-1",
            "+1",
            "M",
            "1MM",
            "1.3M",
            "99999999999999999999",
            "99999999999T",
            "é",
            "1é",
            "ms",
        ] {
            for unit in [Unit::Bytes, Unit::Blocks, Unit::Ms, Unit::Permille, Unit::Count] {
                assert!(unit.parse(text).is_err(), "{unit:?} {text:?}");
            }
        }
    }

    #[test]
    fn sizes_are_parsed_as_in_all_programs() {
        for text in ["64MiB", "64M", "65536K", "0.0625G", "67108864"] {
            for unit in [Unit::Bytes, Unit::Blocks] {
                assert_eq!(unit.parse(text), Ok(64 * MIB), "{unit:?} {text}");
            }
        }
        assert_eq!(Unit::Blocks.parse("1.5M"), Err(ValueError::Unfit(Unit::Blocks)));
    }
}
