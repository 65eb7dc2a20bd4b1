"""A plugin that lets mypy see through ``@remote``: ``plugins = ["miniray.mypy_plugin"]``.

mypy ignores what a class decorator returns, and can't say of a handle that it has
the methods of its class. With the plugin a decorated class has ``.remote`` with the
constructor's parameters, handles have exactly the class's methods, marked with
``@method`` or not, with exact types, and refs are accepted for arguments given by
name too. Without it, those of a handle return ``ObjectRef[Any]``, and an actor class
gives an ``ActorProxy``, which has the marked ones. Nothing here runs in programs.

mypy can't solve ``T | ObjectRef[T]`` for a ref, so where a parameter of a generic
function is a bare type variable of that function, it takes a value and no ref.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy.errorcodes import ATTR_DEFINED
from mypy.expandtype import expand_type_by_instance
from mypy.maptype import map_instance_to_supertype
from mypy.nodes import ARG_STAR2, MDEF, Decorator, FuncDef, SymbolTableNode, TypeInfo, Var
from mypy.plugin import (
    AnalyzeTypeContext,
    AttributeContext,
    ClassDefContext,
    FunctionContext,
    MethodContext,
    MethodSigContext,
    Plugin,
)
from mypy.typeops import bind_self
from mypy.types import (
    AnyType,
    CallableType,
    FunctionLike,
    Instance,
    Parameters,
    ProperType,
    Type,
    TypeOfAny,
    UnionType,
    get_proper_type,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_REMOTE = frozenset({"miniray.remote", "miniray.decorator.remote"})
_HANDLE = "miniray.actor.ActorHandle"
_PROXY = "miniray.actor.ActorProxy"
_ACTOR_CLASS = "miniray.actor.ActorClass"
_CALLABLE = "miniray._typing.Remote"
_FUNCTION = "miniray.decorator.RemoteFunction"
_DECORATOR = "miniray._typing.Decorator.__call__"
_ACTOR_METHOD = "miniray.actor.ActorMethod"
_MARKED = "miniray._typing.Method"
_REF = "miniray.common.object_ref.ObjectRef"
_GENERATOR = "miniray.objects.object_ref_generator.ObjectRefGenerator"
_COROUTINE = "typing.Coroutine"
_ITERATORS = frozenset(
    f"typing.{name}" for name in ("Generator", "AsyncGenerator", "Iterator", "AsyncIterator")
)
#: Key in the metadata of classes that ``@remote`` decorates.
_DECORATED = "miniray"
#: Classes with a ``remote`` method whose signature takes refs.
_CALLABLES = frozenset(
    {
        _CALLABLE,
        _FUNCTION,
        _ACTOR_METHOD,
        _ACTOR_CLASS,
        _MARKED,
    }
)


class MinirayPlugin(Plugin):
    """The plugin of mypy; see the module's docstring."""

    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        """``@remote`` on a class."""
        return _add_remote if fullname in _REMOTE else None

    def get_class_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """``Counter.remote`` and ``Counter.options``."""
        class_name, _, name = fullname.rpartition(".")
        if name not in ("remote", "options"):
            return None
        symbol = self.lookup_fully_qualified(class_name)
        if symbol is None or not isinstance(symbol.node, TypeInfo):
            return None
        if _DECORATED not in symbol.node.metadata:
            return None
        return self._remote_of_class if name == "remote" else self._options_of_class

    def get_type_analyze_hook(self, fullname: str) -> Callable[[AnalyzeTypeContext], Type] | None:
        """``ActorProxy[Counter]``: the plugin gives an ``ActorHandle[Counter]`` the same types."""
        return _handle_for_proxy if fullname == _PROXY else None

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """``handle.method``."""
        class_name, _, name = fullname.rpartition(".")
        if class_name != _HANDLE or name.startswith("__"):
            return None
        return lambda context: self._method_of_handle(context, name)

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        """``remote(function)`` and ``remote(Class)``."""
        return self._keeping_variables if fullname in _REMOTE else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        """``remote(num_cpus=1)(function)``, of a class too."""
        return self._keeping_variables if fullname == _DECORATOR else None

    def get_method_signature_hook(
        self, fullname: str
    ) -> Callable[[MethodSigContext], FunctionLike] | None:
        """``.remote(...)``."""
        class_name, _, name = fullname.rpartition(".")
        return self._taking_refs if name == "remote" and class_name in _CALLABLES else None

    def _remote_of_class(self, context: AttributeContext) -> Type:
        constructor = get_proper_type(context.type)
        if not isinstance(constructor, CallableType):
            return context.default_attr_type
        handle = self._instance(_HANDLE, [constructor.ret_type])
        return self._with_refs(self._as_function(constructor)).copy_modified(ret_type=handle)

    def _options_of_class(self, context: AttributeContext) -> Type:
        constructor = get_proper_type(context.type)
        if not isinstance(constructor, CallableType):
            return context.default_attr_type
        actor_class = self._instance(_ACTOR_CLASS, [constructor.ret_type, _parameters(constructor)])
        return CallableType(
            arg_types=[AnyType(TypeOfAny.special_form)],
            arg_kinds=[ARG_STAR2],
            arg_names=["options"],
            ret_type=actor_class,
            fallback=self._instance("builtins.function", []),
        )

    def _keeping_variables(self, context: FunctionContext | MethodContext) -> Type:
        """Keep the type variables of a generic function or class in the result of ``remote``."""
        remote = get_proper_type(context.default_return_type)
        target = get_proper_type(context.arg_types[0][0]) if context.arg_types[0] else None
        if (
            not isinstance(remote, Instance)
            or not isinstance(target, CallableType)
            or not target.variables
        ):
            return remote
        if remote.type.fullname == _ACTOR_CLASS:
            return remote.copy_modified(args=[target.ret_type, _parameters(target)])
        if remote.type.fullname == _FUNCTION:
            return remote.copy_modified(args=[_parameters(target), self._result(target.ret_type)])
        return remote

    def _method_of_handle(self, context: AttributeContext, name: str) -> Type:
        handle = get_proper_type(context.type)
        if not isinstance(handle, Instance) or handle.type.fullname != _HANDLE or not handle.args:
            return context.default_attr_type
        actor = get_proper_type(handle.args[0])
        if not isinstance(actor, Instance) or name in handle.type.names:
            return context.default_attr_type
        symbol = actor.type.get(name)
        if symbol is None:
            if actor.type.fallback_to_any:
                return context.default_attr_type
            context.api.fail(
                f'The actor class "{actor.type.name}" has no method "{name}"',
                context.context,
                code=ATTR_DEFINED,
            )
            return AnyType(TypeOfAny.from_error)
        plain, declared = _declaration(symbol.node, actor)
        if isinstance(declared, Instance) and declared.type.fullname == _MARKED:
            parameters, _returned, out = declared.args
            if plain is not None:
                # Decorators are shown a static method as a plain function, self or not, and
                # what a generic method returns, or one that returns Self, is lost in them.
                parameters = _parameters(plain)
                if _is_lost(out, plain):
                    out = self._result(plain.ret_type)
            return self._instance(_ACTOR_METHOD, [parameters, out])
        if plain is None:
            return context.default_attr_type  # overloaded, or not annotated
        return self._instance(_ACTOR_METHOD, [_parameters(plain), self._result(plain.ret_type)])

    def _result(self, returned: Type) -> Type:
        """Return what ``.remote()`` gives for a method that returns this."""
        proper = get_proper_type(returned)
        if isinstance(proper, Instance):
            if proper.type.fullname == _COROUTINE and len(proper.args) == 3:
                *_, result = proper.args
                return self._instance(_REF, [result])
            if proper.type.fullname in _ITERATORS and proper.args:
                return self._instance(_GENERATOR, [proper.args[0]])
        return self._instance(_REF, [returned])

    def _taking_refs(self, context: MethodSigContext) -> FunctionLike:
        return self._with_refs(self._of_generic(context.type) or context.default_signature)

    def _of_generic(self, remote: ProperType) -> CallableType | None:
        """Return what ``.remote`` of a generic function, class or method takes and returns."""
        if not isinstance(remote, Instance):
            return None
        for given in map(get_proper_type, remote.args):
            if isinstance(given, Parameters) and given.variables:
                base = map_instance_to_supertype(remote, self._type(_CALLABLE))
                return CallableType(
                    given.arg_types,
                    given.arg_kinds,
                    given.arg_names,
                    ret_type=base.args[0],
                    fallback=self._instance("builtins.function", []),
                    name="remote",
                    variables=given.variables,
                )
        return None

    def _with_refs(self, plain: CallableType) -> CallableType:
        """Replace each T of a signature by ``T | ObjectRef[T]``, unless that is done already."""
        if any(_takes_ref(kind) for kind in plain.arg_types):
            return plain
        return plain.copy_modified(
            arg_types=[
                UnionType.make_union([kind, self._instance(_REF, [kind])])
                for kind in plain.arg_types
            ]
        )

    def _as_function(self, constructor: CallableType) -> CallableType:
        return constructor.copy_modified(
            fallback=self._instance("builtins.function", []), name="remote"
        )

    def _instance(self, fullname: str, args: list[Type]) -> Instance:
        return Instance(self._type(fullname), args)

    def _type(self, fullname: str) -> TypeInfo:
        symbol = self.lookup_fully_qualified(fullname)
        assert symbol is not None, fullname
        assert isinstance(symbol.node, TypeInfo), fullname
        return symbol.node


def _add_remote(context: ClassDefContext) -> bool:
    info = context.cls.info
    info.metadata[_DECORATED] = {}
    for name in ("remote", "options"):
        var = Var(name, AnyType(TypeOfAny.special_form))
        var.info = info
        var.is_classvar = True
        var.is_initialized_in_class = True
        var._fullname = f"{info.fullname}.{name}"
        info.names[name] = SymbolTableNode(MDEF, var, plugin_generated=True)
    return True


def _handle_for_proxy(context: AnalyzeTypeContext) -> Type:
    return context.api.named_type(
        _HANDLE, [context.api.analyze_type(kind) for kind in context.type.args]
    )


def _declaration(node: object, actor: Instance) -> tuple[CallableType | None, ProperType | None]:
    """Return a method of an actor, without self, and the type that its decorators made of it."""
    decorated: Type | None
    if isinstance(node, FuncDef):
        function, decorated = node, node.type
    elif isinstance(node, Decorator):
        function, decorated = node.func, node.var.type
    else:
        return None, None
    declared = _as_of(actor, function.info, decorated)
    marked = isinstance(declared, Instance)
    plain = _as_of(actor, function.info, function.type) if marked else declared
    if not isinstance(plain, CallableType):
        return None, declared
    return plain if function.is_static else bind_self(plain, actor), declared


def _as_of(actor: Instance, owner: TypeInfo, declared: Type | None) -> ProperType | None:
    """Bind the type variables of ``owner`` in a type to their types in this actor."""
    if declared is None:
        return None
    return get_proper_type(
        expand_type_by_instance(declared, map_instance_to_supertype(actor, owner))
    )


def _is_lost(out: Type, plain: CallableType) -> bool:
    """Return whether what the method returns is not in the type that its decorator gave it."""
    proper = get_proper_type(out)
    if not isinstance(proper, Instance) or proper.type.fullname not in (_REF, _GENERATOR):
        return False  # several values, or none
    return bool(plain.variables) or isinstance(get_proper_type(proper.args[0]), AnyType)


def _takes_ref(kind: Type) -> bool:
    proper = get_proper_type(kind)
    items = proper.items if isinstance(proper, UnionType) else [proper]
    refs = [get_proper_type(item) for item in items]
    return any(isinstance(item, Instance) and item.type.fullname == _REF for item in refs)


def _parameters(function: CallableType) -> Parameters:
    return Parameters(
        function.arg_types,
        function.arg_kinds,
        function.arg_names,
        variables=function.variables,
    )


def plugin(_version: str) -> type[Plugin]:
    """Return the plugin to mypy."""
    return MinirayPlugin
