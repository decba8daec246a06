//! Macros that generate code from the tables of keys.

/// Generates a section from its table: a struct, the parser of its flag, and its JSON format.
///
/// ```text
/// section! {
///     /// Documentation of the struct.
///     pub struct DiskConfig: "--disk" "about, for the help" {
///         path: PathBuf => "about, also the field's documentation",
///         readonly: bool = false => "a key with a default",
///         fds (flag "fd"): Vec<GivenFd> => "a key with another name in the flag",
///     }
///     refused &[unsupported::PCI];
/// }
/// ```
///
/// `words` lists keys of the flag that have no value. `refused` lists tables of refused keys.
/// `strict true` refuses unknown keys in JSON. `defaults true` implements `Default` with the
/// defaults of the table. Use `parse own` for a section that parses its flag itself, and
/// `parse none` for a section that is only part of other sections. Without the text after the flag,
/// the section has no flag, and exists only as a JSON object.
///
/// A key without a default is required, unless its type has a value for absent keys, such as
/// `Option`. A section with a required key has no `Default`. A default may refer to keys above it.
/// A key can have these options, in parentheses:
///
/// | option | meaning |
/// |---|---|
/// | `flag "name"` | name in the flag |
/// | `bare` | the flag may begin with its value, without the key |
/// | `repeated` | may be given several times; the values are joined by commas |
/// | `syntax ("FORM")` | form of the value in the help, instead of that of the type |
/// | `range (LEAST..=MOST)` | bounds of a number or a size, which `check_ranges` checks |
/// | `usually (value)` | default in the help for an `Option` that stays `None` if absent |
/// | `derived` | the default depends on other keys and is not shown in the help |
/// | `json_only` | not a key of the flag, where it has its default |
/// | `json_required` | required in JSON, although it has a default in the flag |
/// | `with function` | function that parses the value in JSON |
/// | `shown` | written to JSON even if it is absent |
/// | `skip_default` | omitted from JSON if it has its default |
/// | `flatten` | a section whose keys are added to these |
#[macro_export]
macro_rules! section {
    // Each of these rules looks for one option in a key's list of options.
    (@flag_name [flag $name:literal $($rest:tt)*] $field:ident) => { $name };
    (@flag_name [$other:tt $($rest:tt)*] $field:ident) => {
        $crate::section!(@flag_name [$($rest)*] $field)
    };
    (@flag_name [] $field:ident) => { stringify!($field) };

    (@syntax [syntax ($form:expr) $($rest:tt)*] $ty:ty) => { || String::from($form) };
    (@syntax [$other:tt $($rest:tt)*] $ty:ty) => { $crate::section!(@syntax [$($rest)*] $ty) };
    (@syntax [] $ty:ty) => { <$ty as $crate::FlagValue>::syntax };

    (@is bare [bare $($rest:tt)*]) => { true };
    (@is repeated [repeated $($rest:tt)*]) => { true };
    (@is $option:ident [$other:tt $($rest:tt)*]) => { $crate::section!(@is $option [$($rest)*]) };
    (@is $option:ident []) => { false };

    // Table of keys.
    (@key [json_only $($rest:tt)*] $($more:tt)*) => { Vec::new() };
    (@key [flatten $($rest:tt)*] $all:tt $field:ident, $ty:ty, $about:literal) => {
        <$ty as $crate::Section>::keys()
    };
    (
        @key [derived $($rest:tt)*]
            $all:tt $field:ident, $ty:ty, $about:literal, $default:expr
    ) => {
        $crate::section!(@key [] $all $field, $ty, $about)
    };
    (@key [$other:tt $($rest:tt)*] $($more:tt)*) => { $crate::section!(@key [$($rest)*] $($more)*) };
    (@key [] $all:tt $field:ident, $ty:ty, $about:literal $(, $default:expr)?) => {
        vec![$crate::Key {
            name: $crate::section!(@flag_name $all $field),
            syntax: $crate::section!(@syntax $all $ty),
            default: $crate::section!(@default $all $ty $(, $default)?),
            range: $crate::section!(@range $all $ty),
            is_bare: $crate::section!(@is bare $all),
            is_repeated: $crate::section!(@is repeated $all),
            about: $about,
        }]
    };
    (@range [range ($range:expr) $($rest:tt)*] $ty:ty) => {
        Some($crate::range_text::<$ty, _>(&$range))
    };
    (@range [$other:tt $($rest:tt)*] $ty:ty) => { $crate::section!(@range [$($rest)*] $ty) };
    (@range [] $ty:ty) => { None };

    // Collects keys with bounds. If a section has such keys but does not check them, the compiler
    // reports an unused method.
    (
        @ranges $Name:ident [$($found:tt)*]
            {$field:ident [range ($range:expr) $($rest:tt)*] $all:tt} $($more:tt)*
    ) => {
        $crate::section!(@ranges $Name [$($found)* {$field $all ($range)}] $($more)*);
    };
    (
        @ranges $Name:ident $found:tt
            {$field:ident [$other:tt $($rest:tt)*] $all:tt} $($more:tt)*
    ) => {
        $crate::section!(@ranges $Name $found {$field [$($rest)*] $all} $($more)*);
    };
    (@ranges $Name:ident $found:tt {$field:ident [] $all:tt} $($more:tt)*) => {
        $crate::section!(@ranges $Name $found $($more)*);
    };
    (@ranges $Name:ident []) => {};
    (@ranges $Name:ident [$({$field:ident $all:tt ($range:expr)})+]) => {
        impl $Name {
            /// Checks the bounds of all keys.
            fn check_ranges(&self) -> Result<(), $crate::ConfigError> {
                $(
                    $crate::check_range(
                        Self::FLAG,
                        $crate::section!(@flag_name $all $field),
                        &self.$field,
                        &$range,
                    )?;
                )+
                Ok(())
            }
        }
    };

    (@default [usually ($usual:expr) $($rest:tt)*] $ty:ty) => {
        $crate::FlagValue::show(&$usual)
    };
    (@default [$other:tt $($rest:tt)*] $($more:tt)*) => {
        $crate::section!(@default [$($rest)*] $($more)*)
    };
    (@default [] $ty:ty) => { None };
    (@default [] $ty:ty, $default:expr) => {{
        let default: $ty = $default;
        $crate::FlagValue::show(&default)
    }};

    // Parsing of the flag.
    (
        @read [json_only $($rest:tt)*]
            $all:tt $options:ident $field:ident, $ty:ty, $default:expr
    ) => {
        $default
    };
    (@read [json_only $($rest:tt)*] $all:tt $options:ident $field:ident, $ty:ty) => {
        $options.absent(stringify!($field))?
    };
    (@read [flatten $($rest:tt)*] $all:tt $options:ident $field:ident, $ty:ty) => {
        <$ty as $crate::Section>::from_options($options)?
    };
    (@read [$other:tt $($rest:tt)*] $all:tt $options:ident $($more:tt)*) => {
        $crate::section!(@read [$($rest)*] $all $options $($more)*)
    };
    (@read [] $all:tt $options:ident $field:ident, $ty:ty) => {
        match $options.take($crate::section!(@flag_name $all $field))? {
            Some(value) => value,
            None => $options.absent($crate::section!(@flag_name $all $field))?,
        }
    };
    (@read [] $all:tt $options:ident $field:ident, $ty:ty, $default:expr) => {
        match $options.take($crate::section!(@flag_name $all $field))? {
            Some(value) => value,
            None => $default,
        }
    };

    // Default values if no key is given.
    (@impl_default $Name:ident [] $fields:tt) => {};
    (@impl_default $Name:ident [true] {
        $($field:ident $options:tt $ty:ty [$($default:expr)?])*
    }) => {
        impl Default for $Name {
            fn default() -> Self {
                $(let $field: $ty = $crate::section!(@without $options $field, $ty $(, $default)?);)*
                Self { $($field),* }
            }
        }
    };
    (@without [flatten $($rest:tt)*] $field:ident, $ty:ty) => { <$ty>::default() };
    (@without [$other:tt $($rest:tt)*] $($more:tt)*) => {
        $crate::section!(@without [$($rest)*] $($more)*)
    };
    (@without [] $field:ident, $ty:ty, $default:expr) => { $default };
    (@without [] $field:ident, $ty:ty) => {
        <$ty as $crate::JsonValue>::absent()
            .expect(concat!(stringify!($field), " has a default"))
    };

    // Parsing of JSON.
    (@take [flatten $($rest:tt)*] $object:ident $walk:ident $field:ident, $ty:ty) => {
        <$ty as $crate::Object>::take($object, $walk)?
    };
    (
        @take [with $read:ident $($rest:tt)*]
            $object:ident $walk:ident $field:ident, $ty:ty $(, $default:expr)?
    ) => {
        match $walk.take_with($object, stringify!($field), $read)? {
            Some(value) => value,
            None => $crate::section!(@absent $walk $field $(, $default)?),
        }
    };
    (
        @take [json_required $($rest:tt)*]
            $object:ident $walk:ident $field:ident, $ty:ty $(, $default:expr)?
    ) => {
        $walk.take($object, stringify!($field))?.ok_or_else(|| $walk.missing(stringify!($field)))?
    };
    (@take [$other:tt $($rest:tt)*] $object:ident $walk:ident $($more:tt)*) => {
        $crate::section!(@take [$($rest)*] $object $walk $($more)*)
    };
    (@take [] $object:ident $walk:ident $field:ident, $ty:ty $(, $default:expr)?) => {
        match $walk.take($object, stringify!($field))? {
            Some(value) => value,
            None => $crate::section!(@absent $walk $field $(, $default)?),
        }
    };
    (@absent $walk:ident $field:ident, $default:expr) => { $default };
    (@absent $walk:ident $field:ident) => { $walk.absent(stringify!($field))? };

    // Writing of JSON.
    (@write [flatten $($rest:tt)*] $map:ident $this:ident $field:ident, $ty:ty) => {
        $crate::Object::write(&$this.$field, $map)?
    };
    (
        @write [shown $($rest:tt)*]
            $map:ident $this:ident $field:ident, $ty:ty $(, $default:expr)?
    ) => {
        $map.serialize_entry(stringify!($field), &$this.$field)?
    };
    (
        @write [skip_default $($rest:tt)*]
            $map:ident $this:ident $field:ident, $ty:ty, $default:expr
    ) => {
        if $this.$field != $default {
            $map.serialize_entry(stringify!($field), &$this.$field)?;
        }
    };
    (@write [$other:tt $($rest:tt)*] $map:ident $this:ident $($more:tt)*) => {
        $crate::section!(@write [$($rest)*] $map $this $($more)*)
    };
    (@write [] $map:ident $this:ident $field:ident, $ty:ty $(, $default:expr)?) => {
        if !$crate::JsonValue::is_absent(&$this.$field) {
            $map.serialize_entry(stringify!($field), &$this.$field)?;
        }
    };

    (@name [flatten $($rest:tt)*] $field:ident, $ty:ty) => {
        <$ty as $crate::Object>::names()
    };
    (@name [$other:tt $($rest:tt)*] $($more:tt)*) => { $crate::section!(@name [$($rest)*] $($more)*) };
    (@name [] $field:ident, $ty:ty) => { vec![stringify!($field)] };

    (
        $(#[$meta:meta])*
        $vis:vis struct $Name:ident: $flag:literal $($about:literal)? {
            $($field:ident $(($($option:tt)+))?: $ty:ty $(= $default:expr)? => $key_about:literal,)*
        }
        $(words $words:expr;)?
        $(refused $refused:expr;)?
        $(strict $strict:literal;)?
        $(defaults $defaults:tt;)?
        $(parse $by:ident;)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        $vis struct $Name {
            $(#[doc = concat!($key_about, ".")] pub $field: $ty,)*
        }

        impl $Name {
            /// Name of the section in errors: its flag or its API call.
            #[allow(dead_code, reason = "not every section is used outside of its table")]
            $vis const FLAG: &'static str = $flag;
        }

        impl $crate::Object for $Name {
            const FLAG: &'static str = $flag;
            $(const REFUSED: &'static [&'static [$crate::Refused]] = $refused;)?
            $(const STRICT: bool = $strict;)?

            fn names() -> Vec<&'static str> {
                [$($crate::section!(@name [$($($option)+)?] $field, $ty)),*].concat()
            }

            fn take(
                object: &mut $crate::serde_json::Map<String, $crate::serde_json::Value>,
                walk: &mut $crate::Walk,
            ) -> Result<Self, $crate::JsonError> {
                $(
                    let $field: $ty =
                        $crate::section!(@take [$($($option)+)?] object walk $field, $ty $(, $default)?);
                )*
                Ok(Self { $($field),* })
            }

            fn write<M: $crate::serde::ser::SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
                let this = self;
                $($crate::section!(@write [$($($option)+)?] map this $field, $ty $(, $default)?);)*
                Ok(())
            }
        }

        impl $crate::JsonValue for $Name {
            fn from_json(
                json: $crate::serde_json::Value,
                walk: &mut $crate::Walk,
            ) -> Result<Self, $crate::JsonError> {
                walk.object(json)
            }
        }

        impl $crate::serde::Serialize for $Name {
            fn serialize<S: $crate::serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let mut map = to.serialize_map(None)?;
                $crate::Object::write(self, &mut map)?;
                $crate::serde::ser::SerializeMap::end(map)
            }
        }

        impl<'de> $crate::serde::Deserialize<'de> for $Name {
            fn deserialize<D: $crate::serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let json = <$crate::serde_json::Value as $crate::serde::Deserialize>::deserialize(from)?;
                let read = $crate::Walk::of_answer().object(json);
                read.map_err($crate::serde::de::Error::custom)
            }
        }

        $crate::section!(@ranges $Name [] $({$field [$($($option)+)?] [$($($option)+)?]})*);
        $crate::section!(@impl_default $Name [$($defaults)?] {
            $($field [$($($option)+)?] $ty [$($default)?])*
        });
        $crate::section!(@section $vis $Name [$($about)?] [$($words)?] [$($by)?] {
            $($field [$($($option)+)?] $ty [$($default)?] $key_about)*
        });
    };

    (@section $vis:vis $Name:ident [] $words:tt $by:tt $fields:tt) => {};
    (@section $vis:vis $Name:ident [$about:literal] [$($words:expr)?] $by:tt {
        $($field:ident $options:tt $ty:ty [$($default:expr)?] $key_about:literal)*
    }) => {
        impl $crate::Section for $Name {
            const ABOUT: &'static str = $about;
            $(const WORDS: &'static [&'static str] = $words;)?

            fn keys() -> Vec<$crate::Key> {
                [$($crate::section!(@key $options $options $field, $ty, $key_about $(, $default)?)),*].concat()
            }

            fn from_options(
                options: &$crate::Options,
            ) -> Result<Self, $crate::ConfigError> {
                $(
                    let $field: $ty =
                        $crate::section!(@read $options $options options $field, $ty $(, $default)?);
                )*
                Ok(Self { $($field),* })
            }
        }

        $crate::section!(@parse $vis $Name $by);
    };
    (@parse $vis:vis $Name:ident []) => {
        impl $Name {
            /// Parses the flag's value.
            $vis fn parse(text: &str) -> Result<Self, $crate::ConfigError> {
                use $crate::{Options, Section, Table};

                Self::from_options(&Options::parse(&Table::of::<Self>(), &[], text)?)
            }
        }
    };
    (@parse $vis:vis $Name:ident [$by:ident]) => {};
}

/// Generates an enum of option words. Each variant has a name in JSON, alternative names in JSON
/// (in parentheses), a word in the flag, and alternative words in the flag:
///
/// ```text
/// FixedVhd = "FixedVhd" ("vhd") "vhd" "fixed-vhd" hidden,
/// ```
///
/// A variant that ends with `hidden` is accepted, but not listed in the help and in errors.
#[macro_export]
macro_rules! words {
    (
        $(#[$meta:meta])*
        $vis:vis enum $Name:ident {
            $(
                $(#[$variant_meta:meta])*
                $Variant:ident = $json:literal $(($($json_alias:literal)+))?
                    $word:literal $($alias:literal)* $($hidden:ident)?,
            )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $Name {
            $($(#[$variant_meta])* $Variant,)*
        }

        impl $crate::Words for $Name {
            const WORDS: &'static [$crate::Word<Self>] = &[$(
                $crate::Word {
                    value: Self::$Variant,
                    json: $json,
                    json_aliases: &[$($($json_alias),+)?],
                    flag: $word,
                    flag_aliases: &[$($alias),*],
                    is_shown: $crate::words!(@shown $($hidden)?),
                },
            )*];
        }

        impl $crate::serde::Serialize for $Name {
            fn serialize<S: $crate::serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str($crate::Words::word(*self).json)
            }
        }
    };
    (@shown) => { true };
    (@shown hidden) => { false };
}

/// Implements [`crate::JsonValue`] and [`crate::FlagValue`] for a type that is a string in both
/// formats. The function at the end parses the string.
#[macro_export]
macro_rules! text_value {
    ($Type:ty, $form:literal, $expected:expr, $read:expr) => {
        impl $crate::JsonValue for $Type {
            fn from_json(
                json: $crate::serde_json::Value,
                walk: &mut $crate::Walk,
            ) -> Result<Self, $crate::JsonError> {
                let read = json.as_str().and_then(<Self as $crate::FlagValue>::read);
                read.ok_or_else(|| walk.wrong(&json, $expected))
            }
        }

        impl $crate::FlagValue for $Type {
            fn syntax() -> String {
                $form.to_owned()
            }

            fn expected() -> String {
                $expected.to_owned()
            }

            fn read(text: &str) -> Option<Self> {
                let read: fn(&str) -> Option<Self> = $read;
                read(text)
            }
        }
    };
}
